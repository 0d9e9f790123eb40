"""Names that vLLM's users type and that this version does not have.

Each is taken at the values at which it changes nothing here, and refused at any other with what to
write instead. So code and command lines move over, and no wish is dropped in silence. Classes and
methods that are absent say the same when they are used.
"""
