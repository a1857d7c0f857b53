"""The verbs as straight lines: gather facts -> judge -> plan -> act -> verify -> report."""
