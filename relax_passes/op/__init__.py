"""Our Relax ops. Importing this package registers them, and their names in TVMScript."""
