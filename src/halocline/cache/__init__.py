"""WHAT WE KEEP WHEN A REQUEST LEAVES. Start at `halocline.cache.tree`: match, lock, advance, close, forget.

keys      what a prefix is looked up by           lock       what one running request has locked
node      one run of granules and its pages       locks      taking and giving up: whose demand is less by what
forest    the radix trees, by namespace           charges    lockers and payers, counted per page
match     the longest boundary that resumes       insert, merge      a request's pages become the tree's
marks     what is worth keeping, told as units    standby    what an output's end would need, until it is marked
ghosts    what was here and went                  decay      tombstones, and the cascade when full pages die
tier, writeback                                   the second level, on the host: what dies here is kept there
audit, audit_marks                                the laws, recounted
"""
