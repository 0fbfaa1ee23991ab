"""The kernels of codecs: native ones for float32 in the memory of this machine, their twins elsewhere."""

from __future__ import annotations

from syncline.codecs.twins import dequantize, pack_signs, quantize, select_largest, unpack_signs

__all__ = ["dequantize", "pack_signs", "quantize", "select_largest", "unpack_signs"]
