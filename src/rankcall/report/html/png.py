"""Pictures of numbers: one pixel a cell, one hue, its strength the value.

The strength is opacity, so that one picture does for light and dark pages; an absent value is
grey. Source of the format: https://www.w3.org/TR/png/
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ABSENT = 255
_MOST = 254
_HUE = (213, 94, 0)  # vermillion of Okabe and Ito's palette, told apart by colour-blind people
_BLUE = (0, 114, 178)
_GREY, _GREY_ALPHA = (128, 128, 128), 36


def levels(values: Floats, highest: float) -> npt.NDArray[np.uint8]:
    """Return 0 to 254 by the square root of the value's share of the highest; 255: absent."""
    with np.errstate(invalid="ignore"):
        share = np.sqrt(np.clip(values / highest, 0, 1)) if highest > 0 else values * 0.0
        found = np.rint(share * _MOST)
    return np.where(np.isnan(values), ABSENT, np.nan_to_num(found)).astype(np.uint8)


def picture(cells: npt.NDArray[np.uint8], *, blue: bool = False) -> str:
    """Return a data: URI of a PNG, ``[row, column]`` of levels."""
    height, width = cells.shape
    hue = _BLUE if blue else _HUE
    palette = bytes(hue) * ABSENT + bytes(_GREY)
    alphas = bytes(round(255 * level / _MOST) for level in range(ABSENT)) + bytes([_GREY_ALPHA])
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = cells
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette),
        (b"tRNS", alphas),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    raw = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(raw).decode()
