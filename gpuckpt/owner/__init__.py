"""The owner: a second process that holds everything which touches the user's job.

ptrace, the GPU driver's calls, CRIU, the restored tree's cgroup and host settings belong to it. The
main process asks by message and does bytes and words. When main is killed, the owner sees an end of
file and unwinds or finishes; when the owner is killed, main sees it and repairs by looking (with a
second owner, `repair`); the journal tells a later run what neither could.
"""
