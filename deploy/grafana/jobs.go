package grafana

var jobs = Dashboard{UID: "quarry-jobs", Title: "Quarry / Jobs", Rows: []Row{
	{"How they stand", []Panel{
		{Title: "Running jobs", Type: Stat, Width: 4, Unit: "short", Queries: []string{": max(quarry_jobs_running)"}},
		{Title: "Parts that wait", Type: Stat, Width: 4, Unit: "short", Queries: []string{`: max(quarry_jobs_parts{state="pending"})`}},
		{Title: "Parts that run", Type: Stat, Width: 4, Unit: "short", Queries: []string{`: max(quarry_jobs_parts{state="running"})`}},
		{Title: "Workers", Type: Stat, Width: 4, Unit: "short", Red: 1, Low: true, Queries: []string{": max(quarry_jobs_workers)"}},
		{Title: "Jobs failed in an hour", Type: Stat, Width: 4, Unit: "short", Red: 1, Queries: []string{`: sum(increase(quarry_worker_ended_jobs_total{state="failed"}[1h]))`}},
		{Title: "Longest standstill", Type: Stat, Width: 4, Unit: "s", Red: 900, Help: "How long a running job has been seen with no part begun, ended or further on.", Queries: []string{": max(quarry_jobs_quiet_seconds)"}},
	}},
	{"Parts", []Panel{
		{Title: "Parts of running jobs", Type: Lines, Unit: "short", Queries: []string{"{{state}}: max by (state) (quarry_jobs_parts)"}},
		{Title: "Parts that wait because of a cap", Type: Lines, Unit: "short", Help: "job: --max-parts of quarry job run; quota: quarry job quota; a worker's: --max-parts of quarry worker, while other workers may run them.", Queries: []string{"{{cap}}: max by (cap) (quarry_jobs_waiting_parts)", "a worker's: max(quarry_worker_waiting_parts)"}},
		{Title: "Parts done", Type: Lines, Unit: "ops", Queries: []string{`{{phase}}: sum by (phase) (rate(quarry_worker_attempts_total{outcome="done"}[$__rate_interval]))`}},
		{Title: "Jobs ended", Type: Lines, Unit: "short", Queries: []string{"{{state}}: sum by (state) (increase(quarry_worker_ended_jobs_total[10m]))"}},
		{Title: "Half of the parts take at most", Type: Lines, Unit: "s", Queries: []string{"{{phase}}: histogram_quantile(0.5, sum by (le, phase) (rate(quarry_worker_attempt_duration_seconds_bucket[5m])))"}},
		{Title: "99 of 100 parts take at most", Type: Lines, Unit: "s", Queries: []string{"{{phase}}: histogram_quantile(0.99, sum by (le, phase) (rate(quarry_worker_attempt_duration_seconds_bucket[5m])))"}},
		{Title: "Map parts by time", Type: Heat, Unit: "s", Queries: []string{`{{le}}: sum by (le) (rate(quarry_worker_attempt_duration_seconds_bucket{phase="map"}[$__rate_interval]))`}},
		{Title: "Attempts not done", Type: Lines, Unit: "ops", Help: "Failed ones are tried again, four times at most; lost ones had another worker meanwhile; those that have yielded had a faster second attempt.", Queries: []string{`{{worker}} {{outcome}}: sum by (worker, outcome) (rate(quarry_worker_attempts_total{outcome!="done"}[$__rate_interval]))`}},
		{Title: "Parts begun again", Type: Lines, Unit: "short", Queries: []string{"on {{worker}}: sum by (worker) (increase(quarry_worker_retried_parts_total[10m]))", "on {{worker}}, from one gone silent: sum by (worker) (increase(quarry_worker_taken_over_parts_total[10m]))"}},
		{Title: "Where parts run", Type: Lines, Unit: "ops", Help: "Near: on the node that has the primary of what they read, over shared memory.", Queries: []string{"{{place}}: sum by (place) (rate(quarry_worker_claimed_parts_total[$__rate_interval]))"}},
	}},
	{"Workers", []Panel{
		{Title: "Slots at work", Type: Lines, Unit: "percentunit", Queries: []string{"{{worker}}: sum by (worker) (quarry_worker_busy_slots) / sum by (worker) (quarry_worker_slots)"}},
		{Title: "Bytes read", Type: Lines, Unit: "Bps", Queries: []string{"{{from}}: sum by (from) (rate(quarry_worker_read_bytes_total[$__rate_interval]))"}},
		{Title: "Records read", Type: Lines, Unit: "ops", Queries: []string{"{{from}}: sum by (from) (rate(quarry_worker_read_records_total[$__rate_interval]))"}},
		{Title: "Objects read", Type: Lines, Unit: "ops", Queries: []string{"{{from}}: sum by (from) (rate(quarry_worker_read_objects_total[$__rate_interval]))"}},
		{Title: "Records emitted", Type: Lines, Unit: "ops", Queries: []string{"{{worker}}: sum by (worker) (rate(quarry_worker_emitted_records_total[$__rate_interval]))"}},
		{Title: "Written between map and reduce", Type: Lines, Unit: "Bps", Queries: []string{"{{worker}}: sum by (worker) (rate(quarry_worker_shuffled_bytes_total[$__rate_interval]))"}},
	}},
}}
