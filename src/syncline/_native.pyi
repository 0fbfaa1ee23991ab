"""What native/bindings.cc offers. The module is absent when no C++ compiler was there at install."""

def build_info() -> dict[str, str]:
    """Return the "compiler", the "cpp_standard", and as "simd" the widest level that this processor has."""
