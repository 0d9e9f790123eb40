"""Engine: requests, their schedule, the step that serves them. `request`, `scheduler`: no torch."""
