"""Rules for choosing what a query attends to, at equal tokens: ``python -m phsa.arena`` (docs/arena.md)."""
