//! [`Current`]: the pass that a backend is computing.

use crate::backend::{Outputs, Pass};
use crate::base::{BaseNeurons, BaseTables};
use crate::rope::rope_turn;
use crate::shape::Shape;

/// A pass, but for its targets, which the backend keeps.
#[derive(Clone, Copy, Debug)]
pub struct Current {
    /// Position of its first token.
    pub first_position: u32,
    /// Its tokens.
    pub tokens: u32,
    /// Whether they are decoded.
    pub decode: bool,
    /// What for.
    pub asked: Asked,
}

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Only the KV cache.
    Nothing,
    /// Logits of the last token.
    LastLogits,
    /// Log-likelihoods of so many tokens.
    Scores {
        /// Index in the pass of the first of them.
        first: u32,
        /// How many.
        count: u32,
    },
}

/// What a backend was made for.
#[derive(Clone, Copy, Debug)]
pub struct PassLimits {
    /// Positions of the KV cache.
    pub context: u32,
    /// Tokens of a pass.
    pub pass_tokens: u32,
    /// Scored tokens of a pass.
    pub scored_tokens: u32,
}

impl Current {
    /// Before the first pass.
    pub const NONE: Current =
        Current { first_position: 0, tokens: 0, decode: false, asked: Asked::Nothing };

    /// A pass that begins.
    ///
    /// # Panics
    /// If it does not fit what the backend was made for.
    #[must_use]
    pub fn of(pass: &Pass<'_>, limits: PassLimits) -> Current {
        let Pass { first_position, tokens, decode, outputs } = *pass;
        assert!(tokens > 0 && tokens <= limits.pass_tokens, "pass of {tokens} tokens");
        assert!(first_position + tokens <= limits.context, "pass ends behind the context");
        assert!(!decode || tokens == 1, "decode is one token a pass");
        let asked = match outputs {
            Outputs::None => Asked::Nothing,
            Outputs::LastLogits => Asked::LastLogits,
            Outputs::Score { first, targets } => {
                let count = targets.len() as u32;
                assert!(count <= limits.scored_tokens, "{count} scored tokens");
                assert!(first + count <= tokens, "scored tokens end behind the pass");
                Asked::Scores { first, count }
            }
        };
        Current { first_position, tokens, decode, asked }
    }

    /// Cosines and sines of its positions; tokens x 2 frequencies.
    pub fn write_turns(&self, frequencies: &[f32], turns: &mut [f32]) {
        let rows = turns.chunks_exact_mut(2 * frequencies.len()).take(self.tokens as usize);
        for (position, turns) in (self.first_position..).zip(rows) {
            let (cosines, sines) = turns.split_at_mut(frequencies.len());
            for ((cos, sin), &frequency) in cosines.iter_mut().zip(sines).zip(frequencies) {
                (*cos, *sin) = rope_turn(position, frequency);
            }
        }
    }

    /// Checks what the base's calls are given.
    ///
    /// # Panics
    /// If it is of another model, or the pass is not decode.
    pub fn check_base(&self, shape: &Shape, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        assert!(self.decode, "a base is for decode");
        assert_eq!(base.hidden() as usize, shape.hidden, "width of the base");
        assert!(base.neurons() <= shape.ffn, "{} neurons", base.neurons());
        tables.check(base);
    }

    /// # Panics
    /// If it asked for no logits.
    pub fn check_logits(&self) {
        assert_eq!(self.asked, Asked::LastLogits, "the pass asked for no logits");
    }

    /// Tokens that it scores.
    ///
    /// # Panics
    /// If it asked for no scores.
    #[must_use]
    pub fn scored(&self) -> usize {
        match self.asked {
            Asked::Scores { count, .. } => count as usize,
            _ => panic!("the pass asked for no scores"),
        }
    }
}
