"""Leases: device memory for programs outside, for a time. Everything here is pure.

``lease_desk`` answers for them; ``granting`` waits until the room is really there; ``tenure`` is
one lease; ``obstacles`` says which jobs wait for one.
"""
