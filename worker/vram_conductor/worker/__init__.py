"""VRAM Conductor: worker."""
