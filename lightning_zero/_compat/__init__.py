"""Private or undocumented names of other packages that this one leans on, one module for each package.

Every name here has a contract test that fails by name when a release drops it.
"""
