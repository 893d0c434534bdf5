#!/bin/sh
# Exit 0 where this machine has an NVIDIA GPU with a driver, 1 elsewhere.
if [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; then exit 0; fi
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU' || exit 1
