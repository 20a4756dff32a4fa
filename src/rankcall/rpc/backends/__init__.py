"""One module per back end, imported when it is first used."""
