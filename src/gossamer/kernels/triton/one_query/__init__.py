"""One query of each sequence, which sees a run of keys that the device alone knows: see `launch_one_query`."""
