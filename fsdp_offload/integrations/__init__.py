"""One thin module for each training framework, in the idiom of its users. Importing one imports that framework."""
