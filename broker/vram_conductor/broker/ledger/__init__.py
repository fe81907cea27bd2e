"""The ledger of one device, and admission over several. Pure; knows nothing of the rest.

- ``ledger``: decide, reserve, commit, roll back, release; ``accounts``: its state and sums
- ``admission``: which device; ``decisions``: the answers; ``denials``, ``refusal``: why not
- ``tenants``: what one principal is shown of the others
- ``claims``: what is asked for and measured; ``capacity``: how much there is
- ``book``, ``models``, ``pools``, ``figure``: what is promised to whom, and how well it is known;
  ``ordered``: largest ones at hand; ``views``: sums to show
- ``host``: memory for parked states; ``leases``, ``foreign``: memory of programs outside
"""
