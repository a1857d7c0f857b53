"""Words for the person: options, screens, the manual. The only place that prints and exits."""
