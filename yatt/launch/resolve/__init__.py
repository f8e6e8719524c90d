"""From the run file and the site file to the config and the job plan."""
