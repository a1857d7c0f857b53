"""One home for each outside effect: programs, /proc and signals, ptrace, CRIU, netlink, cgroups."""
