"""What tests share: tiny runs, ranks, made data, servers. Imported by name: `from support.ranks import …`."""
