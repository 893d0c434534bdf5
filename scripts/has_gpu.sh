#!/bin/sh
# Exit 0 where this machine has an NVIDIA GPU with a driver.
[ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
