// The playground's start.
import "../common/connection.js";
import "../common/keybox.js";
