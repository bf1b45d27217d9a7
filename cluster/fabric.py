"""Kinds of fabric, and how to tell them by the names that transports report. Pure."""

from __future__ import annotations

from enum import StrEnum


class Way(StrEnum):
    """A kind of fabric."""

    RDMA = "rdma"
    NVLINK = "nvlink"
    SHM = "shm"
    TCP = "tcp"


_NAMES = {
    Way.RDMA: ("rc_", "dc_", "ud_", "gga_", "srd"),
    Way.NVLINK: ("cuda_ipc",),
    Way.SHM: ("posix", "sysv", "cma", "knem", "xpmem", "memfd"),
    Way.TCP: ("tcp",),
}
"""How the names of what transports negotiate begin."""


def ways_of(detail: str) -> set[Way]:
    """The kinds of fabric in a link's detail, such as "rc_mlx5, cma; large payloads fetched by the receiver"."""
    lanes = [lane.strip() for lane in detail.partition(";")[0].split(",")]
    return {way for way, names in _NAMES.items() if any(lane.startswith(names) for lane in lanes)}
