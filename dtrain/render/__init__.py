"""Views for people: rich on a terminal, plain lines elsewhere. Nothing here decides anything."""
