"""One thin module per training framework, in its idiom. Importing a module imports the framework."""
