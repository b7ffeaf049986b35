package cpu

import (
	"fmt"
	"sync/atomic"

	"ulysses/internal/status"
)

// pool runs a function on several goroutines at the same time. newPool starts the goroutines; a run
// allocates nothing. The caller is worker 0. The other workers are woken, and a worker joins the
// run if it arrives before the work is done. A run does not wait for workers that arrive later, so
// a small run takes no longer than the caller alone.
type pool struct {
	body   func(worker int)
	state  atomic.Int64 // number of workers that joined the open run, or closed
	wake   []chan struct{}
	done   chan struct{}
	failed atomic.Pointer[failure]
}

// closed is the state in which no worker may join.
const closed = -1

type failure struct{ text string }

func newPool(workers int) *pool {
	p := &pool{wake: make([]chan struct{}, workers-1), done: make(chan struct{}, workers)}
	p.state.Store(closed)
	for i := range p.wake {
		p.wake[i] = make(chan struct{}, 1)
		go p.serve(i+1, p.wake[i])
	}
	return p
}

// serve is the goroutine of a worker.
func (p *pool) serve(worker int, wake <-chan struct{}) {
	for range wake {
		if p.join() {
			p.call(worker)
			p.done <- struct{}{}
		}
	}
}

// join enters the open run and reports whether there is one.
func (p *pool) join() bool {
	for {
		n := p.state.Load()
		if n == closed {
			return false
		}
		if p.state.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// call calls the body. A panic of the body becomes a failure of the run.
func (p *pool) call(worker int) {
	defer func() {
		if r := recover(); r != nil {
			p.failed.CompareAndSwap(nil, &failure{fmt.Sprint(r)})
		}
	}()
	p.body(worker)
}

// run calls body(0) on the caller's goroutine, and body on up to `helpers` workers that arrive in
// time. The body takes tasks from a shared counter and returns when none is left. A panic in a body
// is returned as an Internal error.
func (p *pool) run(helpers int, body func(worker int)) error {
	p.body = body
	p.state.Store(0)
	for _, w := range p.wake[:min(helpers, len(p.wake))] {
		select {
		case w <- struct{}{}:
		default: // a wake of an earlier run is pending; the worker will join this run
		}
	}
	p.call(0)
	for joined := p.state.Swap(closed); joined > 0; joined-- {
		<-p.done
	}
	if f := p.failed.Swap(nil); f != nil {
		return status.Errorf(status.Internal, "cpu: a task panicked: %s; please report this as a bug", f.text)
	}
	return nil
}

// close ends the workers. No run may be in progress.
func (p *pool) close() {
	for _, w := range p.wake {
		close(w)
	}
	p.wake = nil
}
