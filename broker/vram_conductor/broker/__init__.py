"""VRAM Conductor: broker."""
