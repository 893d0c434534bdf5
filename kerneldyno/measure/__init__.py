"""Everything that touches a device: its facts, the processes that compile and time, verification, statistics."""
