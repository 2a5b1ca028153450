"""Tasks: where problems come from (`data`), and how responses to them are scored (`verify`)."""
