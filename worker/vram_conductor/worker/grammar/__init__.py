"""Output that follows a grammar: GBNF text → automaton → which tokens may come next."""
