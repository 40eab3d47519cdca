"""How kernels of one stream may be launched; knows no kernel."""

from __future__ import annotations

import functools

import torch


@functools.cache
def is_overlapped(device: torch.device) -> bool:
    """Say whether a launch can begin while the one before it ends: on Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
