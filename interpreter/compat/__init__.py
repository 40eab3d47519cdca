"""Other languages' names over this one: each module lets their programs run unchanged."""
