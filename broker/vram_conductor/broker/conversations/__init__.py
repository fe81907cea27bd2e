"""Conversations as such: what was said in them, forgetting and copying them.

``turns`` and ``said`` keep what is told by HISTORY, ``opening`` finds a place for a new one, and
``conversation_desk`` answers RESET, FORK and HISTORY. Their jobs are in ``jobs``.
"""
