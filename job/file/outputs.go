package file

import "path/filepath"

// Files that a run writes into output.dir, in addition to model/ and the checkpoints.
const (
	MetricsFile    = "metrics.jsonl"
	ReportFile     = "report.html"
	EvalReportFile = "report-eval.html"
	TraceFile      = "trace.json"
	modelFolder    = "model"
	adapterFolder  = "adapter"

	TensorBoardFolder = "tensorboard"
)

// ModelFolder returns the name in output.dir of the trained model, or of the trained adapters.
func (j *Job) ModelFolder() string {
	if j.LoRA.Rank > 0 {
		return adapterFolder
	}
	return modelFolder
}

// ModelDir returns the folder of the trained model, or of the trained adapters.
func (j *Job) ModelDir() string { return filepath.Join(j.Output.Dir, j.ModelFolder()) }

// CheckpointDir returns the folder of the checkpoints.
func (j *Job) CheckpointDir() string { return filepath.Join(j.Output.Dir, j.Checkpoint.Dir) }

// Outputs returns the names in output.dir that the job writes.
func (j *Job) Outputs() []string { return append(j.OutputFiles(), j.OutputFolders()...) }

// OutputFiles returns the names of the files in output.dir that the job writes.
func (j *Job) OutputFiles() []string {
	if j.Kind == "eval" {
		return []string{MetricsFile, ReportFile, EvalReportFile}
	}
	names := []string{MetricsFile, ReportFile}
	if len(j.Output.Trace) > 0 {
		names = append(names, TraceFile)
	}
	return names
}

// OutputFolders returns the names of the folders in output.dir that the job writes.
func (j *Job) OutputFolders() []string {
	if j.Kind == "eval" {
		return nil
	}
	names := []string{j.Checkpoint.Dir}
	if j.Output.Model {
		names = append(names, j.ModelFolder())
	}
	if j.Output.TensorBoard {
		names = append(names, TensorBoardFolder)
	}
	return names
}

// OperatorFiles returns pointers to the input and output paths of an operator job.
func (j *Job) OperatorFiles() (input, output *string) {
	if j.Kind == "gdn" {
		return &j.GDN.Input, &j.GDN.Output
	}
	return &j.Attention.Input, &j.Attention.Output
}
