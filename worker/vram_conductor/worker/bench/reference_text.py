"""A real text for comparing logits: an ordinary article of an encyclopaedia. *Pure.*

Such a text is what even a small model has learnt to go on with. It was chosen for what it is before
anything was compared on it, and stays.
"""

from __future__ import annotations

TEXT = """\
Copper is a chemical element with the symbol Cu and the atomic number 29. It is a soft metal with a
reddish colour, and it conducts heat and electricity better than any other metal except silver.
Copper is one of the few metals that are found in nature in a pure form, so people used it very
early. The oldest known objects made of copper are about ten thousand years old and come from the
Middle East.

When copper is melted together with tin, the result is bronze, which is harder than either of the
two metals. Bronze was used for tools, weapons and bells, and a whole period of history, the Bronze
Age, is named after it. Brass is made of copper and zinc. It is used for musical instruments, door
handles and water taps.

Today most copper is used for electrical wires and cables. A house contains about two hundred
kilograms of it, and an electric car contains more than a car with a petrol engine. Copper is also
used for pipes and for the roofs of buildings. In the open air its surface slowly turns green. This
layer protects the metal below, and some roofs of old churches are covered by it. The Statue of
Liberty in New York is green for the same reason.

The largest producer of copper is Chile, followed by Peru, China and the Democratic Republic of the
Congo. The ore is usually taken from large open mines. It contains less than one per cent of copper,
so it has to be crushed and concentrated before it can be melted. Copper can be recycled as often as
one likes without becoming worse, and about a third of the copper that is used every year comes from
old products. Plants, animals and human beings need small amounts of copper to live, but too much of
it is poisonous.
"""
