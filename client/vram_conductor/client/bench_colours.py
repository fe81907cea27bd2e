"""The colours of the benches' pictures, and how their page is divided. *Pure.*"""

GOOD, BAD, PLAIN, LIMIT, PALE = "#2f7d4f", "#b3392f", "#3b6ea5", "#444444", "#9db8d6"
ROOM = (0, 0.04, 1, 0.96)
"""Of the page, for the plots; the rest is the title's and the caption's."""
