"""VRAM Conductor: client."""
