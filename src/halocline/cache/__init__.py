"""WHAT WE KEEP WHEN A REQUEST LEAVES. The prefix cache comes with the next release; its seam is in `memory.arena`."""
