"""What is counted and timed, and the page that shows it to Prometheus."""
