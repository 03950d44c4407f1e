"""The kernel's permission to use AMX tiles.

vLLM's CPU attention uses tiles and does not ask for them. oneDNN asks when it multiplies the matrices of a prompt. A
decode instance whose prompts all come from elsewhere computes single tokens only, for which oneDNN needs no tiles: its
first step would end with SIGILL.

Source: `csrc/cpu/cpu_attn_amx.hpp` of vLLM 0.32; `Documentation/arch/x86/xstate.rst` of Linux.
"""

from __future__ import annotations

import ctypes
import platform

_SYS_ARCH_PRCTL = 158
_GET_XCOMP_SUPPORTED, _GET_XCOMP_PERMITTED, _REQUEST_XCOMP_PERMISSION = 0x1021, 0x1022, 0x1023
_XFEATURE_TILE_DATA = 18


def permit_tiles() -> bool:
    """Asks the kernel for AMX tiles, for all threads of this process. Returns true if they may be used.

    Without such a processor or kernel nothing happens.
    """
    if platform.machine() != "x86_64" or not _has_tiles(_GET_XCOMP_SUPPORTED):
        return False
    _arch_prctl(_REQUEST_XCOMP_PERMISSION, ctypes.c_ulong(_XFEATURE_TILE_DATA))
    return _has_tiles(_GET_XCOMP_PERMITTED)


def _has_tiles(question: int) -> bool:
    features = ctypes.c_uint64()
    is_answered = _arch_prctl(question, ctypes.byref(features)) == 0
    return is_answered and bool(features.value >> _XFEATURE_TILE_DATA & 1)


def _arch_prctl(code: int, argument: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_int(code), argument))
