"""The first tables."""

import sqlalchemy as sa
from alembic import op


revision = "0001"
down_revision = None


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True)


def _to(table: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(f"{table}_id", sa.Integer, sa.ForeignKey(f"{table}.id"), nullable=nullable)


def _must(name: str, kind: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, kind, nullable=False)


def _may(kind: type[sa.types.TypeEngine], *names: str) -> list[sa.Column]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def upgrade() -> None:
    """Make the tables."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "device",
        _id(),
        sa.Column("key", sa.String(20), nullable=False, unique=True),
        _must("kind", sa.Text()),
        _must("name", sa.Text()),
        _must("arch", sa.Text()),
        _must("sm_count", sa.Integer()),
        _must("facts", sa.JSON()),
    )
    op.create_table(
        "environment",
        _id(),
        sa.Column("key", sa.String(20), nullable=False, unique=True),
        _must("versions", sa.JSON()),
    )
    op.create_table(
        "workload",
        _id(),
        sa.Column("key", sa.Text, nullable=False, unique=True),
        _must("problem", sa.String(200)),
        _must("shape", sa.JSON()),
        _must("dtype", sa.Text()),
        _must("seed", sa.BigInteger()),
    )
    op.create_index("ix_workload_problem", "workload", ["problem"])
    op.create_table(
        "study",
        _id(),
        _to("workload"),
        _to("device"),
        _to("environment"),
        _must("backend", sa.String(200)),
        _must("kernel_digest", sa.String(64)),
        _must("sampler", sa.String(200)),
        _must("seed", sa.BigInteger()),
        _must("generation", sa.Integer()),
        _must("command", sa.Text()),
        _must("created_at", moment),
        sa.UniqueConstraint(
            "workload_id",
            "device_id",
            "environment_id",
            "backend",
            "kernel_digest",
            "sampler",
            "seed",
            "generation",
            name="uq_study",
        ),
    )
    op.create_table(
        "trial",
        _id(),
        _to("study"),
        _must("number", sa.Integer()),
        _must("config", sa.JSON()),
        _must("config_key", sa.String(20)),
        _must("status", sa.String(40)),
        *_may(sa.Double, "median_us", "low_us", "high_us"),
        _must("sample_count", sa.Integer()),
        _must("samples_us", sa.JSON()),
        *_may(sa.Double, "error_relative", "error_max_abs", "sm_clock_mhz", "power_w"),
        *_may(sa.Integer, "registers", "smem_bytes", "spill_bytes"),
        sa.Column("artifact", sa.String(64), nullable=True),
        _must("message", sa.Text()),
        _must("build_s", sa.Double()),
        _must("measure_s", sa.Double()),
        _must("elapsed_s", sa.Double()),
        _must("finished_at", moment),
        sa.UniqueConstraint("study_id", "number", name="uq_trial"),
    )
    op.create_index("ix_trial_rank", "trial", ["study_id", "status", "median_us", "build_s", "measure_s"])
    op.create_index("ix_trial_config_key", "trial", ["config_key"])
    op.create_table(
        "artifact",
        sa.Column("key", sa.String(64), primary_key=True),
        _must("arch", sa.Text()),
        _must("entry", sa.Text()),
        _must("source", sa.Text()),
        _must("texts", sa.LargeBinary()),
        *_may(sa.Integer, "registers", "smem_bytes", "spill_bytes", "threads"),
        _must("compile_s", sa.Double()),
    )
    op.create_table(
        "playoff",
        _id(),
        sa.Column("key", sa.String(32), nullable=False, unique=True),
        _to("workload"),
        _to("device"),
        _to("environment"),
        _must("created_at", moment),
        _must("seed", sa.BigInteger()),
        _must("rounds", sa.Integer()),
        _must("command", sa.Text()),
        _must("conditions", sa.JSON()),
    )
    op.create_index("ix_playoff_workload", "playoff", ["workload_id", "device_id"])
    op.create_table(
        "playoff_entry",
        _id(),
        _to("playoff"),
        _must("name", sa.String(200)),
        _must("role", sa.String(20)),
        sa.Column("backend", sa.String(200), nullable=True),
        _to("trial", nullable=True),
        *_may(sa.JSON, "config"),
        _must("round_medians_us", sa.JSON()),
        *_may(sa.Double, "median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high"),
        _must("tied_first", sa.Boolean()),
        _must("verified", sa.Boolean()),
        *_may(sa.Double, "error_relative", "sm_clock_mhz", "power_w"),
        _must("status", sa.String(40)),
        _must("message", sa.Text()),
        *_may(sa.JSON, "search"),
    )
    op.create_index("ix_playoff_entry_playoff_id", "playoff_entry", ["playoff_id"])
    op.create_index("ix_playoff_entry_trial_id", "playoff_entry", ["trial_id"])
    op.create_table(
        "ceiling",
        _id(),
        _to("device"),
        _to("environment"),
        _must("name", sa.String(200)),
        _must("value", sa.Double()),
        _must("unit", sa.Text()),
        _must("conditions", sa.JSON()),
        _must("measured_at", moment),
    )
    op.create_index("ix_ceiling_device", "ceiling", ["device_id", "name"])
    op.create_table(
        "profile",
        _id(),
        _to("trial"),
        _must("tool", sa.Text()),
        _must("data", sa.JSON()),
        _must("created_at", moment),
    )
    op.create_index("ix_profile_trial_id", "profile", ["trial_id"])
