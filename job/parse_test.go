package job

import "ulysses/job/file"

// base is the shortest job file of a training job.
const base = "[model]\nnew = { hidden_size = 8 }\n[data]\npath = [\"a.txt\"]\n"

// parse parses the text of a job file in the folder jobs/.
func parse(src string, sets ...string) (*file.Job, error) {
	return file.Parse([]byte(src), "jobs/job.toml", sets, nil)
}
