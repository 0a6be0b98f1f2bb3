"""Ray: actors, pools, membership. The only `import ray`."""
