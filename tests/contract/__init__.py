"""Contract tests: one for every private foreign name that `lightning_zero._compat` calls or overrides.

Each looks its name up in the installed release and checks the little that we rely on (that it exists, its parameters,
what it returns), so that a release which drops or changes it fails here, by name, before anything else does.
"""
