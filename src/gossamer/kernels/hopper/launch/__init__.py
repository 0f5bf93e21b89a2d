"""Calls as data: from a problem, a layout and what is known of the arrays to the steps that compute it."""
