//! [`Decoder`]: the thread that answers, the queue before it, and what it shows of itself meanwhile.
//!
//! A request is a [`Job`]; its answer comes as [`Event`]s through a channel that holds no more than an answer's tokens.
//! Nobody needs to cancel: a job whose receiver is gone is dropped from the queue, or ends at its next token or pass.

use crate::figures::Figures;
use ls_engine::sampler::SamplerOptions;
use ls_run::answer::{Answer, End, Question, Speaker, Step};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// What an answer is made of. After [`Event::Done`] or [`Event::Failed`] nothing comes.
#[derive(Debug)]
pub(crate) enum Event {
    /// More text.
    Text(String),
    /// The answer is over.
    Done(Answer),
    /// It cannot be had.
    Failed(Failure),
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It took too long.
    Late,
    /// The engine failed.
    Engine(String),
}

/// A prompt and how to go on from it.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) tokens: Vec<u32>,
    pub(crate) sampler: SamplerOptions,
    pub(crate) max_tokens: u32,
    pub(crate) stop: Vec<String>,
    /// When the answer must be over.
    pub(crate) deadline: Instant,
}

#[derive(Debug)]
struct Job {
    ask: Ask,
    events: UnboundedSender<Event>,
}

/// The queue is full.
#[derive(Debug)]
pub(crate) struct Full;

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Job>,
    /// Requests may be taken; false until the thread runs and after [`Decoder::stop`].
    open: bool,
    figures: Figures,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Decoder {
    /// Jobs that may wait beside the one that is answered.
    most_waiting: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Decoder {
    /// A queue for `most_waiting` jobs beside the one that is answered.
    pub(crate) fn new(most_waiting: usize) -> Decoder {
        Decoder { most_waiting, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Starts the thread.
    pub(crate) fn start(self: &Arc<Self>, speaker: Speaker) -> std::io::Result<JoinHandle<()>> {
        {
            let mut state = self.state();
            state.open = true;
            state.figures.see(speaker.engine());
        }
        let decoder = Arc::clone(self);
        std::thread::Builder::new().name("decoder".into()).spawn(move || decoder.run(speaker))
    }

    /// Takes no more requests, and ends the answer that is being given.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        state.open = false;
        state.waiting.clear();
        self.changed.notify_all();
    }

    /// Queues a request; its answer comes through the receiver.
    pub(crate) fn submit(&self, ask: Ask) -> Result<UnboundedReceiver<Event>, Full> {
        let mut state = self.state();
        state.waiting.retain(|job| !job.events.is_closed());
        let running = usize::from(state.figures.running);
        if !state.open || state.waiting.len() + running > self.most_waiting {
            state.figures.refused += 1;
            return Err(Full);
        }
        let (events, receiver) = unbounded_channel();
        state.waiting.push_back(Job { ask, events });
        self.changed.notify_one();
        Ok(receiver)
    }

    /// The figures as they are, with the jobs that wait.
    pub(crate) fn figures(&self) -> Figures {
        let state = self.state();
        let mut figures = state.figures;
        figures.waiting = state.waiting.len();
        figures
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done by a panic in between: figures are copied in whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, mut speaker: Speaker) {
        while let Some(job) = self.next() {
            self.answer(&mut speaker, &job);
            self.state().figures.running = false;
        }
    }

    /// Waits for a job that somebody still wants; None after [`Decoder::stop`].
    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if !state.open {
                return None;
            }
            match state.waiting.pop_front() {
                Some(job) if job.events.is_closed() => state.figures.cancelled += 1,
                Some(job) => {
                    state.figures.running = true;
                    return Some(job);
                }
                None => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn answer(&self, speaker: &mut Speaker, job: &Job) {
        let ask = &job.ask;
        let question = Question {
            tokens: &ask.tokens,
            sampler: ask.sampler,
            max_tokens: ask.max_tokens,
            stop: &ask.stop,
            ignore_eos: false,
        };
        let started = Instant::now();
        let mut late = false;
        let answer = speaker.answer(&question, &mut |step, engine| {
            if let Step::Text(text) = step {
                // A receiver that is gone is seen below.
                let _ = job.events.send(Event::Text(text.to_owned()));
            }
            late = Instant::now() > ask.deadline;
            let mut state = self.state();
            match step {
                Step::Prompt { .. } => state.figures.see(engine),
                Step::Token(_) => {
                    state.figures.see(engine);
                    state.figures.token();
                }
                Step::Text(_) => {}
            }
            if late || job.events.is_closed() || !state.open {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let mut state = self.state();
        state.figures.see(speaker.engine());
        let event = match answer {
            Ok(_) if late => {
                state.figures.late += 1;
                Event::Failed(Failure::Late)
            }
            Ok(answer) => {
                if answer.end == End::Cancelled {
                    state.figures.cancelled += 1;
                } else {
                    state.figures.answered(&answer, started.elapsed());
                }
                Event::Done(answer)
            }
            Err(error) => {
                state.figures.failed += 1;
                Event::Failed(Failure::Engine(error.to_string()))
            }
        };
        drop(state);
        // Nobody may listen any more.
        let _ = job.events.send(event);
    }
}
