"""For CPUs: a schedule for PrimFuncs without a rule of their own; passes after the schedules."""
