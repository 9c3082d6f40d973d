//! [`Trial`]: whether something pays, found out by doing it and not doing it in turn.
//!
//! Speculation often loses: it is worth the time that reads hide, and costs reads in vain and predictions. No model of
//! that is needed where both can be measured. Windows of tokens alternate between on and off; the faster one then
//! stays for a while, until it is tried again. Results do not depend on it, only times.

use std::time::{Duration, Instant};

/// Tokens of a window.
const WINDOW: u32 = 8;
/// Windows of a trial: on, off, on, off, so that growing contexts and warming caches weigh little.
const WINDOWS: u32 = 4;
/// Tokens that the winner stays for.
const STAY: u32 = 256;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Trial {
    /// Tokens since this trial began.
    token: u32,
    since: Option<Instant>,
    /// Time of the tokens with it off and on.
    spent: [Duration; 2],
    on: bool,
    tokens_on: u64,
    tokens: u64,
}

impl Trial {
    /// The next token begins now: on or off?
    pub(crate) fn next(&mut self, now: Instant) -> bool {
        let trial = WINDOW * WINDOWS;
        if let Some(since) = self.since.filter(|_| self.token > 0 && self.token <= trial) {
            // The first token of a window still lives on what the one before has read.
            if !(self.token - 1).is_multiple_of(WINDOW) {
                self.spent[usize::from(self.on)] += now.duration_since(since);
            }
        }
        if self.token == trial + STAY {
            self.token = 0;
            self.spent = [Duration::ZERO; 2];
        }
        self.on = if self.token < trial {
            (self.token / WINDOW).is_multiple_of(2)
        } else {
            self.spent[1] <= self.spent[0]
        };
        self.token += 1;
        self.since = Some(now);
        self.count()
    }

    /// The next token begins, and there is nothing to find out.
    pub(crate) fn fixed(&mut self, on: bool) -> bool {
        self.on = on;
        self.count()
    }

    fn count(&mut self) -> bool {
        self.tokens += 1;
        self.tokens_on += u64::from(self.on);
        self.on
    }

    /// Tokens with it on, and all.
    pub(crate) fn tokens(&self) -> (u64, u64) {
        (self.tokens_on, self.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often it is on in some tokens, if they take so long.
    fn share_on(tokens: u32, off: Duration, on: Duration) -> f64 {
        let (mut trial, mut now) = (Trial::default(), Instant::now());
        for _ in 0..tokens {
            now += if trial.next(now) { on } else { off };
        }
        trial.tokens().0 as f64 / f64::from(tokens)
    }

    #[test]
    fn what_pays_stays_and_what_does_not_is_only_tried() {
        let [slow, fast] = [12, 10].map(Duration::from_millis);
        let trying = f64::from(WINDOW * WINDOWS) / f64::from(WINDOW * WINDOWS + STAY);
        assert!(share_on(2880, slow, fast) > 1.0 - trying);
        assert!(share_on(2880, fast, slow) < trying);
    }

    #[test]
    fn a_change_of_fortune_is_noticed() {
        let (mut trial, mut now) = (Trial::default(), Instant::now());
        let mut on_late = 0;
        for token in 0..1200 {
            let on = trial.next(now);
            let pays = token >= 300;
            now += Duration::from_millis(if on == pays { 10 } else { 12 });
            on_late += u32::from(on && token >= 800);
        }
        assert!(on_late > 300, "{on_late} of 400");
    }
}
