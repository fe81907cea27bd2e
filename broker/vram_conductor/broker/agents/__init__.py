"""Agents, from REGISTER to UNREGISTER (*pure*).

- ``agent_desk``: what clients ask; ``spec``: what REGISTER means
- ``lobby``, ``registration``: waiting for a worker; estimate, reserve, load, commit
- ``fit_desk``, ``fit_search``: what would be admitted
- ``estimates``, ``asking``, ``fitting``, ``loading``: the questions and commands on the way
- ``reload``: agents that come back (``model_change``: is it the same file?)
- ``removal``: agents that go
"""
