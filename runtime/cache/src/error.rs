//! [`TraceError`] and [`ReuseError`]: what is wrong with bytes.

use std::fmt;

macro_rules! error {
    ($(#[$doc:meta])* $name:ident, $text:literal) => {
        $(#[$doc])*
        #[derive(Debug, thiserror::Error)]
        #[error($text)]
        pub struct $name {
            what: &'static str,
            found: String,
            wanted: String,
        }

        impl $name {
            pub(crate) fn new(
                what: &'static str,
                found: impl fmt::Display,
                wanted: impl fmt::Display,
            ) -> $name {
                $name { what, found: found.to_string(), wanted: wanted.to_string() }
            }
        }
    };
}

error!(/** Bytes are not a trace. */ TraceError, "unusable access trace: {what}: {found} found, {wanted} wanted");
error!(/** Bytes are not a table of reuse. */ ReuseError, "unusable reuse table: {what}: {found} found, {wanted} wanted");
