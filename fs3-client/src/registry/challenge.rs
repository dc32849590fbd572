//! What a registry says of how it wants to be asked: the header `WWW-Authenticate` (RFC 9110, 11.6.1) and the answers
//! of token servers (distribution, "Token Authentication Specification"). Bytes in, structure out.

use serde::Deserialize;
use std::time::Duration;

/// Longest token; it has to fit into a header beside others.
const TOKEN_MAX: usize = 64 << 10;
/// How long a token lasts whose server does not say.
const DEFAULT_LIFE: Duration = Duration::from_secs(60);

/// How a registry wants to be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    /// With a user name and a password.
    Basic,
    /// With a token from elsewhere.
    Bearer {
        /// The token server's address.
        realm: String,
        /// What the registry is called there.
        service: Option<String>,
    },
}

impl Challenge {
    /// The challenge to meet of all that the headers hold: a token before a password. `None` when there is none that we
    /// can meet.
    pub(super) fn choose<'h>(headers: impl Iterator<Item = &'h str>) -> Option<Self> {
        let mut basic = None;
        for header in headers {
            for challenge in http_auth::parse_challenges(header).unwrap_or_default() {
                let param = |name: &str| {
                    let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
                    found.map(|(_, value)| value.to_unescaped())
                };
                if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    if let Some(realm) = param("realm").filter(|realm| !realm.is_empty()) {
                        return Some(Self::Bearer { realm, service: param("service") });
                    }
                } else if challenge.scheme.eq_ignore_ascii_case("basic") {
                    basic = Some(Self::Basic);
                }
            }
        }
        basic
    }
}

/// A token server's answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) token: String,
    /// How long it lasts.
    pub(super) life: Duration,
}

#[derive(Deserialize)]
struct RawToken {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<f64>,
}

impl Token {
    /// # Errors
    /// Why it is no token, to follow "the token server's answer".
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let raw: RawToken = serde_json::from_slice(bytes).map_err(|e| format!("is not valid: {e}"))?;
        let token = [raw.token, raw.access_token].into_iter().flatten().find(|token| !token.is_empty());
        let token = token.ok_or("has no token in it")?;
        if token.len() > TOKEN_MAX {
            return Err(format!("has a token of {} bytes, more than the {TOKEN_MAX} that are taken", token.len()));
        }
        if !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("has a token that cannot be sent".to_owned());
        }
        let life = raw.expires_in.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Ok(Self { token, life: life.filter(|life| !life.is_zero()).unwrap_or(DEFAULT_LIFE) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bearer(realm: &str, service: Option<&str>) -> Option<Challenge> {
        Some(Challenge::Bearer { realm: realm.to_owned(), service: service.map(str::to_owned) })
    }

    #[test]
    fn challenges() {
        for (headers, expected) in [
            (
                &[r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io""#][..],
                bearer("https://auth.docker.io/token", Some("registry.docker.io")),
            ),
            (&[r#"bearer Realm="https://x/t",scope="repository:a:pull,push""#], bearer("https://x/t", None)),
            (&[r#"Basic realm="a, b", Bearer realm="https://x/\"t""#], bearer("https://x/\"t", None)),
            (&["Basic realm=x", r#"Bearer realm="https://x""#], bearer("https://x", None)),
            (&[r#"Basic realm="Registry Realm""#], Some(Challenge::Basic)),
            (&["Basic"], Some(Challenge::Basic)),
            (&[r#"Bearer service="x""#], None),
            (&[r#"Bearer realm="""#], None),
            (&["Negotiate"], None),
            (&["", ",,,", "=", "Bearer realm="], None),
            (&[], None),
        ] {
            assert_eq!(Challenge::choose(headers.iter().copied()), expected, "{headers:?}");
        }
    }

    #[test]
    fn tokens() {
        let token = |text: &str| Token::parse(text.as_bytes());
        let of = |token: &str, secs| Ok(Token { token: token.to_owned(), life: Duration::from_secs(secs) });
        assert_eq!(token(r#"{"token":"a","expires_in":300,"issued_at":"x"}"#), of("a", 300));
        assert_eq!(token(r#"{"access_token":"b"}"#), of("b", 60));
        assert_eq!(token(r#"{"token":"","access_token":"b","expires_in":-5}"#), of("b", 60));
        assert_eq!(token(r#"{"token":"b","expires_in":1e300}"#), of("b", 60));
        for bad in ["", "[]", "{}", r#"{"token":"a\nb"}"#, r#"{"token":"ä"}"#, r#"{"token":" "}"#] {
            assert!(token(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_header(text in r#"(Bearer|Basic|x)? ?([a-z]{1,7}=("[^"]{0,9}"|[a-z]{0,5}),? ?){0,4}|.{0,60}"#) {
            let _ = Challenge::choose([text.as_str()].into_iter());
        }

        #[test]
        fn any_token(bytes in prop::collection::vec(any::<u8>(), 0..200), seconds in any::<f64>()) {
            let _ = Token::parse(&bytes);
            let json = serde_json::json!({ "token": String::from_utf8_lossy(&bytes), "expires_in": seconds });
            if let Ok(token) = Token::parse(json.to_string().as_bytes()) {
                let header = format!("Bearer {}", token.token);
                prop_assert!(reqwest::header::HeaderValue::from_str(&header).is_ok());
            }
        }
    }
}
