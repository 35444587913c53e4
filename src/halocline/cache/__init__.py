"""WHAT WE KEEP WHEN A REQUEST LEAVES. Start at `halocline.cache.tree`: match, lock, advance, close, forget.

keys      what a prefix is looked up by           locks      who locks which pages, and whose demand is less by them
node      one run of granules and its pages       insert     a request's pages become the tree's
forest    the radix trees, by namespace           decay      tombstones, and the cascade when full pages die
match     the longest boundary that resumes       marks      what is worth keeping, told to the arena as units
ghosts    what was here and went                  audit, audit_marks      the laws, recounted
"""
