"""Wire protocol of VRAM Conductor: messages, codec, limits, errors. See protocol/SPEC.md."""
